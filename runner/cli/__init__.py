"""From the command line to composed configurations, and every refusal in one line."""
