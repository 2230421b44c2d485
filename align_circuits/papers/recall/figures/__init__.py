"""The studies behind the figures: each trains and measures once; its experiments draw and check the table."""
