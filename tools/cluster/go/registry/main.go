// Command registry is the CNCF distribution registry with the file system as its only storage.
//
// The cluster's containerd pulls from it and buildah pushes to it, both over the loopback address. The drivers
// for the clouds' object stores are left out: they are most of the upstream program's build time.
package main

import (
	"os"

	"github.com/distribution/distribution/v3/registry"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
)

func main() {
	if err := registry.RootCmd.Execute(); err != nil {
		os.Exit(1)
	}
}
