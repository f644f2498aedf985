"""Settings, validated, and the jobs they come to, before anything runs."""
