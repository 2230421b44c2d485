"""What validates the package itself: `localize` and attribution where the truth is known, and the bundled model."""
