"""Estimates as text and pictures: `tables` for the terminal, `svg` bars and the memory-speed picture, `page` the static
page whose model runs in the browser.
"""
