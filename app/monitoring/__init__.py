"""Online calibration in the service: feedback, the monitor that folds it, alarms and gated refits."""
