"""Pipeline-parallel schedules as plain data."""
