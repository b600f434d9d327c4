"""The caches of diffusion-pipe."""
