"""Commands on what a run left: its model and its record."""
