"""Files on the disk, whatever is in them: written whole or not at all, one at a time, and where it may; and read
without waiting, or dropping anything silently."""
