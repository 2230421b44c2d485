"""What validates the package itself: `localize` and attribution where the truth is known, the bundled model, costs.

It is imported as `align_circuits.validation`, through a symlink, in a checkout alone: no wheel holds it.
"""
