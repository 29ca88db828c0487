"""Schema, reading and checks of the configuration."""
