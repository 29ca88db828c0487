"""The mechanics of a stage; knows no task, field or model."""
