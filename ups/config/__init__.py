"""The configuration: its sections (schema), how files are read (reading) and become sections (convert, load),
what is refused (checks), and the command line (command)."""
