"""The layers of our cache, as transformers' `Cache` drives them."""
