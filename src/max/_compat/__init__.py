"""The compatibility wing: names and forms of other versions of the API.

Nothing inside imports it. `max` installs the finder of names that nothing defines, `max.pipelines` the forms in which
architectures and configurations may be declared, and documented modules (faces) show what their pages have. Names say
the version: ``v26`` is the form of 26.x, ``v1`` a layer in the interface of 24.x that 25.x documents as ``…V1``.
"""
