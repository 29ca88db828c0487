"""UPS, the Universal Physics Stack: a latent simulator of partial differential equations one can trust."""

__version__ = "0.1.0"
