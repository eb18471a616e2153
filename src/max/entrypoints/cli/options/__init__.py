"""The options of commands: of models, of the server, of files, and those of other programs."""
