"""What the attention modules of a model do: their softmax, the layers that stay their own, latents."""
