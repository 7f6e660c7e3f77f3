"""torch's FlexAttention: functions traced to masks and scores."""
