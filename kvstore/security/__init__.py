"""Authentication, authorisation and audit of callers. Rules: SECURITY.md beside this file."""
