"""Images in a prompt: the tokens that stand for them, and the positions behind them."""
