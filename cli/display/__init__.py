"""What people see: progress bars on stderr, tables and JSON on stdout."""
