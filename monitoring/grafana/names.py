"""Uids by which what is ours is found again, in every Grafana and for ever."""

DATASOURCE_UID = "raydix-prometheus"
DATASOURCE_NAME = "Raydix Prometheus"
FOLDER_UID = "raydix"
RULE_GROUP = "raydix"
