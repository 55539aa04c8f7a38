"""Estimates as text and pictures: `tables` for the terminal, `svg` bars and the memory-speed picture, `page` the page
with sliders, saved or served, whose figures Python computes.
"""
