"""Pictures and traces of a simulation, without dependencies.

=============  =====================================================================
`svg`          one SVG document, or one page of HTML with drawing and numbers
`trace`        Chrome trace events, for Perfetto
=============  =====================================================================
"""
