"""The op that people call, with gradients: it chooses, checks and launches. Needs torch and triton."""
