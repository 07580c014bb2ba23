"""The profile store: measurements that teams exchange."""
