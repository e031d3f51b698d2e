//! One macro for the closed sets of names on the wire.

/// A closed set of names: the enum, its list, its texts.
macro_rules! names {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $text)] $variant,)+
        }

        impl $name {
            /// Every value, with the name that the contract gives it.
            pub const ALL: &[(&str, Self)] = &[$(($text, Self::$variant),)+];

            /// The name that the contract gives it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }

            /// The value of that name.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
            }
        }
    };
}

pub(crate) use names;
