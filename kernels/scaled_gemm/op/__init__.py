"""The ops that people call, with gradients: they quantise, choose, check and launch. Needs torch and triton."""
