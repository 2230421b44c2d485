"""Tables of measurements with intervals: `Table` and its `Provenance`, statistics over prompts, and emergence.

In: arrays of one number for each row and prompt. Out: tidy frames, saved as csv beside their provenance.
"""
