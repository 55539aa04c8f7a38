"""Pictures and traces of a simulation, without dependencies.

=============  =====================================================================
`svg`          one SVG document
`html`         one self-contained page: drawing and numbers
`trace`        Chrome trace events, for Perfetto
=============  =====================================================================
"""
