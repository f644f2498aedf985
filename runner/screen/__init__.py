"""What people read: progress, tables, reports."""
