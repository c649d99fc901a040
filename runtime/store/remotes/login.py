"""Credentials for registries: those that `docker login` keeps, or $INGOT_REGISTRY_USER and _PASSWORD."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...errors import WorkFailed

USER_VARIABLE, PASSWORD_VARIABLE = "INGOT_REGISTRY_USER", "INGOT_REGISTRY_PASSWORD"
_HELPER_TIMEOUT_S = 30
_TOKEN_USER = "<token>"
"""What credential helpers give as the user where the secret is an identity token."""


@dataclass(frozen=True)
class Challenge:
    """What a registry wants: scheme "basic" or "bearer", the latter with realm and service."""

    scheme: str
    parameters: dict[str, str]

    @classmethod
    def parse(cls, header: str) -> Self | None:
        scheme, _, rest = header.partition(" ")
        if scheme.lower() not in ("basic", "bearer"):
            return None
        parameters = {key.lower(): value for key, value in re.findall(r'(\w+)="([^"]*)"', rest)}
        if scheme.lower() == "bearer" and not parameters.get("realm", "").startswith(("https://", "http://")):
            return None
        return cls(scheme.lower(), parameters)


class Login:
    """The credentials for one registry, looked up when they are first needed."""

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self._found: tuple[str, str] | None = None
        self._looked = False

    def basic(self, base: str) -> str:
        """The header of basic authentication. Raises WorkFailed if there are no credentials."""
        user, secret = self._credentials() or (None, None)
        if user is None:
            raise WorkFailed(f"{base} wants user and password.\n  {self.advice()}")
        return "Basic " + base64.b64encode(f"{user}:{secret}".encode()).decode()

    def token_request(self, challenge: Challenge, scope: str) -> tuple[str, dict[str, str], bytes | None]:
        """(URL, headers, body) of the request for a token; without credentials, for one that anybody gets."""
        fields = {"service": challenge.parameters.get("service", ""), "scope": scope}
        realm, credentials = challenge.parameters["realm"], self._credentials()
        if credentials is not None and credentials[0] == _TOKEN_USER:
            body = {**fields, "grant_type": "refresh_token", "client_id": "ingot", "refresh_token": credentials[1]}
            return realm, {"Content-Type": "application/x-www-form-urlencoded"}, urllib.parse.urlencode(body).encode()
        headers = {} if credentials is None else {"Authorization": self.basic(realm)}
        return f"{realm}{'&' if '?' in realm else '?'}{urllib.parse.urlencode(fields)}", headers, None

    def advice(self) -> str:
        return (f"Credentials for {self._registry} come from `docker login`, or from ${USER_VARIABLE} and "
                f"${PASSWORD_VARIABLE}.")

    def _credentials(self) -> tuple[str, str] | None:
        if not self._looked:
            self._found, self._looked = self._look(), True
        return self._found

    def _look(self) -> tuple[str, str] | None:
        if user := os.environ.get(USER_VARIABLE):
            return user, os.environ.get(PASSWORD_VARIABLE, "")
        path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker", "config.json")
        try:
            config = json.loads(path.read_bytes())
            helper = config.get("credHelpers", {}).get(self._registry) or config.get("credsStore")
            entry = config.get("auths", {}).get(self._registry, {})
            return _of_entry(entry) or (_from_helper(helper, self._registry) if helper else None)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, TypeError, binascii.Error) as error:
            raise WorkFailed(f"cannot read the credentials in {path}: {error}") from None


def _of_entry(entry: dict[str, Any]) -> tuple[str, str] | None:
    if token := entry.get("identitytoken"):
        return _TOKEN_USER, token
    if not (auth := entry.get("auth")):
        return None
    user, _, password = base64.b64decode(auth, validate=True).decode().partition(":")
    return user, password


def _from_helper(helper: str, registry: str) -> tuple[str, str] | None:
    """Asks docker-credential-HELPER, as docker does."""
    try:
        done = subprocess.run([f"docker-credential-{helper}", "get"], input=registry.encode(), capture_output=True,
                              timeout=_HELPER_TIMEOUT_S, check=False)
        if done.returncode != 0:
            return None
        answer = json.loads(done.stdout)
        return answer["Username"], answer["Secret"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        raise WorkFailed(f"docker-credential-{helper} gives no credentials for {registry}: {error}") from None
