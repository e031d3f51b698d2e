//! What an API key may do.

use crate::names::names;

names!(
    /// One permission of a credential.
    Permission {
        /// Read prompts.
        PromptsRead = "prompts:read",
        /// Write prompts.
        PromptsWrite = "prompts:write",
        /// Read channels.
        ChannelsRead = "channels:read",
        /// Write channels.
        ChannelsWrite = "channels:write",
        /// List API keys.
        ApiKeysRead = "apiKeys:read",
        /// Make and revoke API keys.
        ApiKeysWrite = "apiKeys:write",
        /// List members.
        MembersRead = "members:read",
        /// Add and remove members.
        MembersWrite = "members:write",
        /// Read suites, cases, batches and runs.
        EvalsRead = "evals:read",
        /// Start and cancel batches.
        EvalsWrite = "evals:write",
        /// List the stored environment.
        CredentialsRead = "credentials:read",
        /// Change the stored environment.
        CredentialsWrite = "credentials:write",
        /// Lease the values of stored credentials.
        CredentialsUse = "credentials:use",
        /// Administer the organization.
        OrganizationAdmin = "organization:admin",
        /// Act as another user.
        PlatformImpersonate = "platform:impersonate",
    }
);
