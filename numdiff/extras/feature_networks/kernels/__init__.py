"""What the feature networks compute and the core has no operation for."""
