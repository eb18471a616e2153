"""Makes a program ready to run: compiles it or finds it on the disk, binds weights, links addresses."""
