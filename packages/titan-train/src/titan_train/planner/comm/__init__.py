"""Transfers: `links` the alpha-beta time of one collective on the link its group spans, `traffic` counts and bytes by axis."""
