"""The op that people call, with gradients: it checks, chooses and launches. Needs torch and triton."""
