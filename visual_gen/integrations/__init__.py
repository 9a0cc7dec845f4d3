"""Our attention under other packages' models."""
