"""What people read on a terminal and type there: tables, progress, numbers."""
