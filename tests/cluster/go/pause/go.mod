module ppojob.dev/tests/cluster/pause

go 1.24.0

tool ppojob.dev/tests/cluster/pause
