"""Players to compare with: rules, and policies that others trained."""
