"""Writing to the disk, whatever it is that is written: whole or not at all, one at a time, and where it may."""
