"""What runs in a reader's browser: style sheets, scripts, and the HTML that they need."""
