"""What runs on the device. Triton compiles these functions: their arguments are tensors of pointers, not of torch."""
