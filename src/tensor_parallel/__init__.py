"""One line splits any PyTorch model over any devices, exactly."""
