"""Diffusion corrector, its students, the steady prior."""
