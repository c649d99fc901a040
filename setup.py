"""Maps compiler/, runtime/ and plugins/ to ingot.*; everything else stands in pyproject.toml.

The list of packages is computed here because pyproject.toml can find packages but cannot prefix their names.
"""

from setuptools import find_namespace_packages, setup

FOLDERS = ("compiler", "plugins", "runtime")

setup(
    # Folders without an __init__.py count too: they hold C sources and YAML that must reach the wheel.
    packages=[
        f"ingot.{package}"
        for folder in FOLDERS
        for package in [folder, *(f"{folder}.{name}" for name in find_namespace_packages(folder))]
        if "__pycache__" not in package
    ],
    package_dir={f"ingot.{folder}": folder for folder in FOLDERS},
)
