"""The service that gives the groups' rewards to any trainer over HTTP."""
