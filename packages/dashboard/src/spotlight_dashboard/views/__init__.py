"""What each view of the page shows, as JSON: functions of a run directory."""
