"""From pictures and clips to latents."""
