"""What goes beyond the papers: experiments on their models and tasks that no figure of theirs shows.

They are imported as `align_circuits.beyond`, through a symlink, in a checkout alone: no wheel holds them.
"""
