"""The configuration: its sections (schema), how files become sections (load), what is refused (checks), the
settings that weights store too (model), and the command line (command)."""
