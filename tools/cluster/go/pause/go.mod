module ppojob.dev/tools/cluster/pause

go 1.24.0

tool ppojob.dev/tools/cluster/pause
