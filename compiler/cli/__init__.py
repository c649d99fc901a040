"""The verbs that need the compiler. Each only reads the command line; a module beside this folder does the work."""
